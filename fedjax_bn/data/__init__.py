"""Data: readers of datasets, the division among clients, and the pixels that a model sees.

labels           labels: a number each, boxes, or masks
domain, source   the data of a run (domains with training, validation and test samples), and of
                 a reader (pools of named samples); both with checks
seeds, threads   random numbers and digests that are the same on any machine; work in threads
pixels/          image files decoded and kept, changed at random in training, normalized
division/        `clients.make_clients` makes the clients of a federation and the unseen domains
sets/            readers of images with classes or boxes; `folders`, `box_folders` and `npz` read a
                 user's own
masks/           readers of images with masks
sampling         the samples of all clients on the device, and the draws of a round
"""
