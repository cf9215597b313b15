"""Machine files of clusters, published or measured."""
