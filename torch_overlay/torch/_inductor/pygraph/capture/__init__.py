"""Recording a function as a CUDA graph: nodes of trees, memory of outputs, collectives."""
