"""A Flower app: a client and a server of the method that the config file names."""
