"""``saltern bench``: our speed beside the machine's own limits, measured in one interleaved run.

Absolute figures of a busy or throttled machine mean little; what lasts is the ratio of two things measured in turns.
"""
