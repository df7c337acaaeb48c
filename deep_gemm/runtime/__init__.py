"""The way of a call, from its arguments to a launch."""
