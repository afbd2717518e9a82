"""What PyGraph asks CUDA graph trees and does to them, and how trees call PyGraph."""
