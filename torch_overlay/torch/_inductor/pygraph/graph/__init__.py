"""CUDA graphs: placeholders, the nodes that hold them, ways to set them. No torch.compile."""
