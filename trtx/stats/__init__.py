"""Statistics without I/O: percentiles, bootstrap, and confidence intervals of means, ratios and proportions."""
