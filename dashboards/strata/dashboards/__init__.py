"""Grafana dashboards as code, and the commands that build and push them.

- `boards/` has one file per dashboard, made of the panel types in `panels.py`.
- `style.py` has units, thresholds and colours. `promql.py` writes queries from metrics. `series.py` lists the series of other
  programs and of recording rules.
- `generate.py` writes the files that Grafana loads. `queries.py` lists every query, for tests against a real Prometheus.
- `push.py` writes dashboards, data source and alert rules to a running Grafana through `grafana.py`. `alert_rules.py` converts
  Prometheus alerts to Grafana alert rules.
"""
