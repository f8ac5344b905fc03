"""What people read: terminal, page, statements, frames and curves, from one summary of a run."""
