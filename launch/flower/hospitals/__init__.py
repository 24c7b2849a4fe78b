"""The app: a client and a server, each of whatever method its config file names."""
