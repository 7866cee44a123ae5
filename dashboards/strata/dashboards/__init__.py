"""What Grafana shows of the platform, as code, and how it gets there.

`series.py` names what is read beside the platform's own metrics, `promql.py` writes queries from metrics, `style.py` has
units, limits and colours, `panels.py` the kinds of picture, `boards/` one file a board. `generate.py` writes what Grafana
loads from files, `queries.py` lists every query for whoever wants to try them. `push.py` brings boards, data source and alert
rules into a running Grafana, over `grafana.py`, which turns its answers into errors a user can act on; `alert_rules.py` says
Prometheus's alerts in Grafana's words.
"""
