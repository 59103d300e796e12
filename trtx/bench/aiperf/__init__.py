"""aiperf's command line, its processes, and what trtx adds inside them."""
