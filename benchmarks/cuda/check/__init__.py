"""`make gpu-check`: whether this project is right and fast on the card at hand, in a few minutes and one table.

__main__.py starts stages as processes, stages.py lists them, rows.py keeps what they say.
"""
