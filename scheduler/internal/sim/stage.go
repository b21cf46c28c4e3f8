package sim

import (
	"slices"
	"time"

	"github.com/kvscout/kvscout/scheduler/internal/sim/arrival"
)

// Stage is what became of the requests that came in one stage of the load.
type Stage struct {
	QPS      float64 `json:"qps"`
	Requests int     `json:"requests"` // that were served
	TTFTMean float64 `json:"ttft_mean_s"`
	TTFTP50  float64 `json:"ttft_p50_s"`
	TTFTP90  float64 `json:"ttft_p90_s"`
	// Throughput in output tokens, from the stage's start to the last token of
	// its requests.
	Throughput float64 `json:"throughput_tok_s"`
}

// stageLog collects the requests of one stage.
type stageLog struct {
	arrival.Stage
	ttft   []float64 // s
	tokens int
	last   time.Duration
}

func newStageLogs(stages []arrival.Stage) []stageLog {
	logs := make([]stageLog, len(stages))
	for i, s := range stages {
		logs[i].Stage = s
	}
	return logs
}

// stage is the one in which a request came; nil: in none.
func (l *log) stage(at time.Duration) *stageLog {
	for i := range l.stages {
		if s := &l.stages[i]; s.Start <= at && at < s.End {
			return s
		}
	}
	return nil
}

func (l *stageLog) result() Stage {
	slices.Sort(l.ttft)
	return Stage{
		QPS: l.QPS, Requests: len(l.ttft), TTFTMean: mean(l.ttft), TTFTP50: quantile(l.ttft, .5), TTFTP90: quantile(l.ttft, .9),
		Throughput: share(float64(l.tokens), (l.last - l.Start).Seconds()),
	}
}
