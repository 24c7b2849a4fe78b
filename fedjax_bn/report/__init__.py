"""Tables, plots and the page of finished runs; `page.write_report` and `page.write_comparison`."""
