"""What the other packages exchange. Nothing here imports from another package of PyGraph."""
