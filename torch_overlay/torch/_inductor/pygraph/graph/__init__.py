"""
CUDA graphs: placeholder addresses, the nodes that hold them, and the ways to set them. It
knows nothing of torch.compile.
"""
