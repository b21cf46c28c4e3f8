// Command caddy is Caddy with kvscout, as xcaddy builds it.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/kvscout/kvscout/deploy/proxies/caddy"
)

func main() { caddycmd.Main() }
