"""aiperf's command line, its processes, and the patches that trtx applies inside them."""
