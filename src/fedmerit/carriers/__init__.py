"""What every carrier between machines needs, whatever carries the bytes: shapes, measures, run folders."""
