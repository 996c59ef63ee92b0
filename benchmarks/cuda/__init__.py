"""What the engine reaches on a CUDA device, held to what the device could do: `python -m benchmarks.cuda.check`.

Every part builds random models of true shapes in its own process. docs/cuda.md says what each measures.
"""
