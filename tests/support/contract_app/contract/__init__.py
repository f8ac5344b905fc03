"""The tiny federation of the embedded engine, as a Flower app: same data, same seeds, same numbers."""
