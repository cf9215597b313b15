"""Memory that devices share, and the windows of arrays that copies move."""
