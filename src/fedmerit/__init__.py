"""fedmerit: who contributed what, without anyone seeing anyone's model update."""
