"""The arithmetic of who worked and who waited, on numbers a reader can check."""

import pytest

from muster.observe.balance import Balance


def test_two_steps_of_two_ranks_by_hand():
    balance = Balance()
    #            compute, others, data, all, filled, cells
    balance.add([(3.0, 0.0, 0.5, 4.0, 90, 100), (1.0, 2.0, 0.5, 4.0, 50, 100)])
    balance.add([(2.0, 0.0, 0.0, 2.0, 80, 80), (2.0, 0.0, 0.0, 2.0, 100, 120)])
    assert balance.steps == 2
    assert balance.summary() == pytest.approx(
        {
            "slowest_over_mean": (1.5 + 1.0) / 2,
            "padding_share": 1 - 320 / 400,
            "data_wait_share": 1.0 / 12.0,
            "comm_wait_share": 2.0 / 12.0,
        }
    )


def test_slowness_that_changes_hands_is_not_averaged_away():
    balance = Balance()
    balance.add([(2.0, 0, 0, 2.0, 1, 1), (1.0, 0, 0, 2.0, 1, 1)])
    balance.add([(1.0, 0, 0, 2.0, 1, 1), (2.0, 0, 0, 2.0, 1, 1)])
    assert balance.summary()["slowest_over_mean"] == pytest.approx(4 / 3)


def test_one_rank_is_balanced_with_itself():
    balance = Balance()
    balance.add([(0.7, 0.1, 0.2, 1.0, 3, 4)])
    assert balance.summary()["slowest_over_mean"] == 1.0


def test_a_step_without_any_computing_counts_as_balanced():
    balance = Balance()
    balance.add([(0.0, 0.5, 0.5, 1.0, 0, 0), (0.0, 0.5, 0.5, 1.0, 0, 0)])
    assert balance.summary()["slowest_over_mean"] == 1.0


def test_before_the_first_step_there_is_nothing_to_say():
    assert Balance().summary() == {}
