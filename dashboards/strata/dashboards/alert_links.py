"""Links from alerts to boards and from panels to runbooks."""

from strata.monitoring.prometheus import runbooks

TIME = "${__url_time_range}"
CLUSTER = "var-cluster=${__data.fields.cluster}"
# Links of a row in the table of alerts, with its labels as variables of the board they lead to.
OF_AN_ALERT = {
    "Runbooks": f"{runbooks.BASE}#alerts",  # a link cannot lower the case of a name, as the anchors of runbooks have it
    "Cluster board": f"/d/strata-cluster?{CLUSTER}&var-node=${{__data.fields.node}}&{TIME}",
    "Training board": f"/d/strata-training?{CLUSTER}&var-run=${{__data.fields.run}}&{TIME}",
    "Serving board": f"/d/strata-serving?{CLUSTER}&var-model=${{__data.fields.model}}&{TIME}",
}


def runbook(alert: str) -> str:
    return f"{runbooks.BASE}#{alert.lower()}"
