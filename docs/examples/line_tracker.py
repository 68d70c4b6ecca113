"""A tracker that writes a line for every call."""

import json

import muster


class Lines(muster.Tracker):
    def start(self, run):
        """`run` has name, folder, recipe, step and, after a resume, the id that was returned here."""
        self.file = (run.folder / "lines.txt").open("a")
        return run.id or run.name

    def metrics(self, step, values):
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def finish(self, status):
        """`status` is finished, stopped, failed or restarts."""
        self.file.close()
