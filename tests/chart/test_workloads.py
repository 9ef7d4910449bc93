"""Pods of every configuration: what they may, how they are asked, how they end, and that all they name is there."""

from __future__ import annotations

import pytest

from tests.chart.rendered import CONFIGURATIONS, Pod, find, kinds, pods

pytestmark = pytest.mark.chart

ALL = [(configuration, pod) for configuration in CONFIGURATIONS for pod in pods(configuration)]
every_pod = pytest.mark.parametrize(("configuration", "pod"), ALL, ids=[f"{name}/{pod.name}" for name, pod in ALL])


def of(configuration: str, name: str) -> Pod:
    (found,) = [pod for pod in pods(configuration) if pod.name == name]
    return found


@every_pod
def test_a_pod_may_little(configuration: str, pod: Pod) -> None:
    context = pod.spec["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == 10001
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["enableServiceLinks"] is False
    for container in (*pod.spec["containers"], *pod.spec.get("initContainers", [])):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["limits"]["memory"]
        # What makes folders of the node is the one that is root, with what that takes.
        if container["name"] == "host-paths":
            assert own["capabilities"]["add"] == ["CHOWN", "FOWNER"]
        else:
            assert "add" not in own["capabilities"]
            assert "runAsUser" not in own


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_folders_of_the_node_are_for_the_nodes_cache_alone(configuration: str) -> None:
    """Without it every pod fits Kubernetes' strictest level, as the operator's page says."""
    node = any(pod.component == "kvcache-node" for pod in pods(configuration))
    folders = {
        (pod.component, volume["name"])
        for pod in pods(configuration)
        for volume in pod.spec["volumes"]
        if not {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "image"} & set(volume)
    }
    allowed = {("kvcache-node", "socket"), ("kvcache-node", "disk"), ("engine", "socket")}
    assert folders == (allowed if node else set())
    assert node or not any("initContainers" in pod.spec for pod in pods(configuration))


@every_pod
def test_secrets_are_referenced_and_never_told(configuration: str, pod: Pod) -> None:
    for variable in pod.container.get("env", []):
        secret = (
            any(word in variable["name"] for word in ("SECRET", "PASSWORD", "API_KEY"))
            and "FILE" not in variable["name"]
        )
        assert not secret or "secretKeyRef" in variable["valueFrom"]
    assert "args" not in pod.container


@every_pod
def test_three_probes_ask_three_things(configuration: str, pod: Pod) -> None:
    container = pod.container
    if pod.component == "test":
        assert "livenessProbe" not in container
        return
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    checks = [{key: probe.get(key) for key in ("grpc", "httpGet")} for probe in probes]
    assert checks[1] != checks[2]
    # Who lives is not asked about others.
    assert checks[2]["httpGet"]["path"] == "/healthz"
    tls = any(mount["mountPath"] == "/etc/katydid/tls" for mount in container["volumeMounts"])
    for check in checks:
        if check["grpc"]:
            assert not tls
            assert check["grpc"]["port"] == pod.ports["grpc"]
        else:
            assert check["httpGet"]["port"] in pod.ports
    started_within = probes[0]["periodSeconds"] * probes[0]["failureThreshold"]
    assert started_within >= {"gateway": 60, "engine": 300}.get(pod.component, 300)


def test_engines_are_asked_by_grpc_where_it_is_plain() -> None:
    assert of("hy3-tp8", "demo-engine-main").container["readinessProbe"]["grpc"] == {"port": 8100}
    assert of("everything", "demo-engine-main").container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert of("prefill-decode", "demo-kvcache-pool").container["readinessProbe"]["grpc"] == {"port": 8200}


@every_pod
def test_a_pod_gets_the_time_that_its_drain_takes(configuration: str, pod: Pod) -> None:
    if pod.component == "test":
        return
    prefix = {"gateway": "GATEWAY", "engine": "ENGINE"}.get(pod.component, "KVCACHE")
    drain = float(pod.environment[f"KATYDID_{prefix}_DRAIN_TIMEOUT_S"])
    before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert (before > 0) == (pod.component == "gateway")
    assert pod.spec["terminationGracePeriodSeconds"] >= before + drain + 10


@every_pod
def test_mounts_have_volumes_and_volumes_are_mounted(configuration: str, pod: Pod) -> None:
    volumes = {volume["name"] for volume in pod.spec["volumes"]}
    for owner in kinds(configuration, "StatefulSet"):
        if owner["metadata"]["name"] == pod.name:
            volumes |= {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
    containers = (*pod.spec["containers"], *pod.spec.get("initContainers", []))
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert mounted == volumes
    here = {each["metadata"]["name"] for each in kinds(configuration, "ConfigMap")}
    maps = {volume["configMap"]["name"] for volume in pod.spec["volumes"] if "configMap" in volume}
    assert maps <= here
    assert pod.spec["serviceAccountName"] in {
        each["metadata"]["name"] for each in kinds(configuration, "ServiceAccount")
    }


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_services_lead_to_pods_that_have_their_ports(configuration: str) -> None:
    for service in kinds(configuration, "Service"):
        chosen = [pod for pod in pods(configuration) if service["spec"]["selector"].items() <= pod.labels.items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(pod.ports)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_selectors_choose_their_own_pods_alone(configuration: str) -> None:
    for manifest in kinds(configuration, "Deployment", "StatefulSet", "DaemonSet"):
        chosen = [
            pod.name
            for pod in pods(configuration)
            if manifest["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        ]
        assert chosen == [manifest["metadata"]["name"]]
    for budget in kinds(configuration, "PodDisruptionBudget"):
        assert any(
            budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items() for pod in pods(configuration)
        )


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_what_scales_is_there_and_has_no_replicas_of_its_own(configuration: str) -> None:
    scalers = kinds(configuration, "HorizontalPodAutoscaler", "ScaledObject")
    targets = {(each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"]) for each in scalers}
    assert len(targets) == len(scalers)
    for manifest in kinds(configuration, "Deployment", "StatefulSet", "LeaderWorkerSet"):
        scaled = (manifest["kind"], manifest["metadata"]["name"]) in targets
        assert scaled != ("replicas" in manifest["spec"])


def test_autoscalers_ask_for_what_rules_and_gateways_say() -> None:
    (hpa,) = [each for each in kinds("everything", "HorizontalPodAutoscaler") if "engine" in each["metadata"]["name"]]
    asked = hpa["spec"]["metrics"][0]["external"]["metric"]
    assert asked["selector"]["matchLabels"] == {"role": "decode"}
    rules = [
        rule
        for each in kinds("everything", "PrometheusRule")
        for group in each["spec"]["groups"]
        for rule in group["rules"]
    ]
    assert asked["name"] in {rule.get("record") for rule in rules}
    exported = {f"katydid_gateway_{name}" for name in ("desired_replicas", "in_flight_requests")}
    for scaled in (*kinds("everything", "ScaledObject"), *kinds("existing secrets", "ScaledObject")):
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        assert any(f"({name}{{" in query for name in exported)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_gateways_know_every_engine_that_can_be_there(configuration: str) -> None:
    (gateway,) = [pod for pod in pods(configuration) if pod.component == "gateway"]
    engines = dict(item.split("=") for item in gateway.environment["KATYDID_GATEWAY_ENGINES"].split(","))
    most = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"].get("maxReplicas") or each["spec"]["maxReplicaCount"]
        for each in kinds(configuration, "HorizontalPodAutoscaler", "ScaledObject")
    }
    expected = {}
    for manifest in kinds(configuration, "StatefulSet", "LeaderWorkerSet"):
        name = manifest["metadata"]["name"]
        if not name.startswith("demo-engine-"):
            continue
        for index in range(most.get(name) or manifest["spec"]["replicas"]):
            pool = name.removeprefix("demo-engine-")
            nodes = manifest["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
            for suffix in (str(index), *(f"{index}-{node}" for node in range(1, nodes))):
                expected[f"{pool}-{suffix}"] = f"{name}-{suffix}.{name}.serving.svc:8100"
    assert engines == expected


def test_images_by_tag_and_by_digest() -> None:
    assert of("defaults", "demo-gateway").container["image"] == "katydid-gateway:0.1.0"
    assert of("existing secrets", "demo-gateway").container["image"] == f"katydid-gateway@sha256:{'0' * 64}"
    assert of("cpu-demo", "demo-engine-main").container["image"] == "katydid-engine:0.1.0-cpu"


def test_certificates_name_what_they_are_asked_for() -> None:
    """Gateways speak to engines, and engines to caches, by the names in their environment."""
    names = {each["metadata"]["name"]: each["spec"].get("dnsNames", []) for each in kinds("everything", "Certificate")}
    gateway = of("everything", "demo-gateway").environment
    for item in gateway["KATYDID_GATEWAY_ENGINES"].split(","):
        host = item.partition("=")[2].rpartition(":")[0]
        assert "*." + host.partition(".")[2] in names["demo-engine"]
    for address in of("everything", "demo-engine-main").environment["KATYDID_ENGINE_KVCACHE_INSTANCES"].split(","):
        assert "*." + address.rpartition(":")[0].partition(".")[2] in names["demo-kvcache"]
    assert "demo-gateway.serving.svc" in names["demo-gateway"]
    assert "llm.test" in names["demo-gateway"]


def test_the_ingress_lets_streams_through() -> None:
    notes = find("everything", "Ingress", "demo-gateway")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert notes[f"{prefix}proxy-buffering"] == notes[f"{prefix}proxy-request-buffering"] == "off"
    assert int(notes[f"{prefix}proxy-read-timeout"]) == int(notes[f"{prefix}proxy-send-timeout"]) == 7200
    assert notes[f"{prefix}proxy-body-size"] == "8m"
    assert notes[f"{prefix}backend-protocol"] == "HTTPS"
    route = find("everything", "HTTPRoute", "demo-gateway")["spec"]["rules"][0]
    assert route["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    paths = {match["path"]["value"] for match in route["matches"]}
    assert "/v1" in paths
    assert not {"/metrics", "/"} & paths
