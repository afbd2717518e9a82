"""
What PyGraph asks CUDA graph trees and does to them: queries on paths and recordings, drops,
locks and the order of streams, and the protocol by which trees call PyGraph.
"""
