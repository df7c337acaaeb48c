"""The device code, as data: `kernels/*.cu.jinja` are thin skeletons, `include/*.cuh` plain headers."""
