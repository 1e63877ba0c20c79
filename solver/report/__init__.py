"""Pages for people: a plan, two compared, or the cells of a store, as one HTML file that needs nothing else.

Charts are SVG that a template draws, not a plotting library: a page stays far below a megabyte, prints, and can be read by
a screen reader; the cost is that nothing can be zoomed. What is shown is data of unknown origin, so templates escape all
of it, texts are cut and lists are bounded, and the page forbids itself every request and every script but its own.
"""

from shardwise.solver.report.catalogue import catalogue_page
from shardwise.solver.report.page import MAX_PAGE_BYTES, comparison_page, report_page

__all__ = ["MAX_PAGE_BYTES", "catalogue_page", "comparison_page", "report_page"]
