"""The driver API: loading modules, tensor maps, launching. Each file wraps one concern."""
