"""A federation as small as it gets: softmax regression in numpy, so that no process imports torch."""
