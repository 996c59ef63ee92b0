"""Independent references that tests and benchmarks compare with: texts of PEFT, drafts of plain transformers, counts by
replay.
"""
