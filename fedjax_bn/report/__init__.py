"""Tables, plots and the page of a run."""

from fedjax_bn.report import plots, tables
from fedjax_bn.report.page import write_comparison, write_data_plots, write_report

__all__ = ["plots", "tables", "write_comparison", "write_data_plots", "write_report"]
