"""What every block of the recipe is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """One block of the recipe. Unknown keys are refused, values are immutable once validated."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def fixed(*default: Any, **options: Any) -> Any:
    """A key that a run must keep when it goes on from a checkpoint: it decides what is computed."""
    return Field(*default, json_schema_extra={"resume": "fixed"}, **options)


def free(*default: Any, **options: Any) -> Any:
    """A key that may change when a run goes on from a checkpoint."""
    return Field(*default, json_schema_extra={"resume": "free"}, **options)
