"""
Recording a function as a CUDA graph: nodes of CUDA graph trees that copy or bind their
inputs, the memory of outputs, and collectives.
"""
