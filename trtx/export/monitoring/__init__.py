"""Files with which Prometheus and Grafana watch a served topology: scrape file, rules, and a dashboard.

Owns the addresses that are scraped, the recording and alert rules, and the panels of the dashboard.
Leaves the metrics themselves to ``worker`` and Dynamo: ``trtx/worker/served_families`` and ``upstream_families.py``
have the record of each family that a rule or a panel uses.
Enter through :mod:`~trtx.export.monitoring.exported`.
Invariants: each query names families of the records only; every target has the labels ``topology``, ``role`` and
``name``.
"""
