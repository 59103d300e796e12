"""``trtx eval parity``: its spec, passes, servers and evidence."""
