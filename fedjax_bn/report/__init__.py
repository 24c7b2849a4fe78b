"""Draws tables, plots and the HTML page of finished runs: see `page.write_report`."""
