"""Where the work runs: sizes, meshes, one short file per technique, and the order they apply in."""
