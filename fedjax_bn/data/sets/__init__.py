"""Reads datasets: `load_NAME` of each module returns a `Source` or a `Dataset`.

Common arguments are the file or folder, or the folder around it (`path`); pixels a side of the
squares to which images are brought (`image_size`); names of domains, in that order, and of classes,
in the order of the labels, each empty for all by name or by the publication (`domains`, `classes`);
and `cache`, `progress` and `orientation` of `pixels.decode.decode`. In embedded sets the seed draws
who owns which scan and all that a domain does to it; the same seed gives the same bytes.

A reader raises FileNotFoundError for missing files, with their layout and where to get them, and
ValueError for an unsuitable argument, or a damaged file, with its path and the library's reason.
"""
