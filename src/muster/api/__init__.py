"""The Python API that `import muster` offers, which the command line stands on."""
