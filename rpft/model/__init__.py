"""A checkpoint becomes a list of layers, their host store, and the functions that run them."""
