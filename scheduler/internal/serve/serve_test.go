package serve

import (
	"testing"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	api "github.com/kvscout/kvscout/protocol/kvscout/scheduler/v1"
)

func TestNotServingFromTheFirstCall(t *testing.T) {
	state := newHealth()
	for _, service := range []string{"", api.Scheduler_ServiceDesc.ServiceName} {
		h, err := state.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || h.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Errorf("%q: %v, %v", service, h, err)
		}
	}
}
