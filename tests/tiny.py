"""Tiny random models of real architectures, made on the fly: small enough for milliseconds, scaled so that greedy
text varies (at least 12 distinct tokens in 24).
"""
