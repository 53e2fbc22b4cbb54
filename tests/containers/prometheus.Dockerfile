# Debian's Prometheus under the name that docker-compose.yml takes, where no registry is reachable.
ARG BASE
FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends prometheus busybox \
 && ln -s /bin/busybox /usr/local/bin/wget \
 && install -d -o 65534 -g 65534 /prometheus \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ENTRYPOINT ["prometheus"]
