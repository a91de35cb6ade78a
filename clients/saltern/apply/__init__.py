"""A deployment as files say it: read (:mod:`.yaml_tree`, :mod:`.schema`), compared with what is there
(:mod:`.planner`), carried out (:mod:`.executor`) and written down again (:mod:`.export`).

Only :mod:`.observer` and :mod:`.executor` call the control plane; everything else is values in, values out.
"""
