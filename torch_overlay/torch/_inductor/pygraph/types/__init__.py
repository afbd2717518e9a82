"""
What the other packages exchange: candidates, reasons, descriptions of functions, results of
recordings, reports. Nothing here imports from another package of PyGraph.
"""
