"""Implements `omni-async report`: one or more runs as a page that opens offline.

`data.page_of` turns runs into plain data, section by section; `page/` draws them in the same way for a report and a
live run.
"""
