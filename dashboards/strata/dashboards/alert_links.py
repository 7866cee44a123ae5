"""Links from alerts to boards and from panels to runbooks."""

RUNBOOKS = "https://strata.example/docs/monitoring.md"

TIME = "${__url_time_range}"
CLUSTER = "var-cluster=${__data.fields.cluster}"
# Links of a row in the table of alerts, with its labels as variables of the board they lead to.
OF_AN_ALERT = {
    "Runbook": f"{RUNBOOKS}#${{__value.text}}",
    "Cluster board": f"/d/strata-cluster?{CLUSTER}&var-node=${{__data.fields.node}}&{TIME}",
    "Training board": f"/d/strata-training?{CLUSTER}&var-run=${{__data.fields.run}}&{TIME}",
    "Serving board": f"/d/strata-serving?{CLUSTER}&var-model=${{__data.fields.model}}&{TIME}",
}


def runbook(alert: str) -> str:
    return f"{RUNBOOKS}#{alert.lower()}"
