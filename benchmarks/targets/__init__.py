"""What a cluster is made of: machine files, published or measured."""
