"""Reports as one HTML file each: no script, no network, nothing to install.

::

    ReplayReport --> report_page --+
                                   +--> tables, plots --> markup --> one self-contained page
    Comparison ---> diff_page -----+

``markup`` escapes by construction: text becomes HTML in no other way. ``palette`` holds every colour, ``scales`` says
where ticks stand, ``plots`` draws SVG. All of it is pure.
"""

from saltern.replay.html.diff_page import diff_page
from saltern.replay.html.report_page import report_page

__all__ = ["diff_page", "report_page"]
