"""Data: readers of datasets, the division among clients, and the pixels that a model sees.

    label_trees      labels: a number each, or boxes
    domain, source   the data of a run (domains with training, validation and test samples), and of
                     a reader (pools of named samples); both with checks
    seeds, messages  random numbers and digests that are the same on any machine; messages for the
                     user
    pixels/          image files decoded and kept, changed at random in training, normalized
    division/        splits, partitions, sizes: `clients.make_clients` makes the clients of a
                     federation and the unseen domains of a source
    sets/            readers of images with classes; `image_folders` is a table of those
                     that are only folders, `folders` and `npz` read a user's own data
    boxes/           images with boxes: `box_folders.load_boxes(path, ...)`
    sampling         the samples of all clients on the device, and the draws of a round
    drawing          the same in one call for a user's own arrays

Each imports only from those above it, and `sampling` only from `domain` and `label_trees`.
`run/experiment/datasets.py` lists the names of datasets in a configuration;
`training/rounds.py` reads from the host what the device cannot hold.
"""
