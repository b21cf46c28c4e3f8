package gateway

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"

	"github.com/kvscout/kvscout/scheduler/internal/edge"
)

// models answers with the models of all members: each engine is asked that serves
// one of which nobody has told yet, and of one whose engine does not answer there
// is the name alone.
func (g *Gateway) models(w http.ResponseWriter, r *http.Request) error {
	told := make(map[string]json.RawMessage)
	var names []string
	members := 0
	for _, m := range g.cfg.Fleet.View().Members {
		if m.Info.Address == "" {
			continue
		}
		members++
		fresh := false
		for _, name := range m.Info.Models {
			if !slices.Contains(names, name) {
				names, fresh = append(names, name), true
			}
			fresh = fresh || told[name] == nil
		}
		if !fresh {
			continue
		}
		for name, card := range g.modelsOf(r, m.Info.URL()) {
			told[name] = card
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	if members == 0 {
		return edge.Nobody
	}
	list := make([]any, 0, len(names))
	for _, name := range names {
		if card := told[name]; card != nil {
			list = append(list, card)
			continue
		}
		list = append(list, map[string]any{"id": name, "object": "model", "owned_by": "vllm"})
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": list})
}

// modelsOf an engine by their names, each as it tells of it; nil: it does not.
func (g *Gateway) modelsOf(r *http.Request, url string) map[string]json.RawMessage {
	ctx, cancel := context.WithTimeout(r.Context(), modelsWait)
	defer cancel()
	ask, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/models", nil)
	if err != nil {
		return nil
	}
	if key := r.Header.Get("Authorization"); key != "" {
		ask.Header.Set("Authorization", key)
	}
	answer, err := g.transport.RoundTrip(ask)
	if err != nil {
		return nil
	}
	defer answer.Body.Close()
	var page struct{ Data []json.RawMessage }
	if json.NewDecoder(io.LimitReader(answer.Body, maxModels)).Decode(&page) != nil {
		return nil
	}
	cards := make(map[string]json.RawMessage)
	for _, card := range page.Data {
		var named struct{ ID string }
		if json.Unmarshal(card, &named) == nil && named.ID != "" {
			cards[named.ID] = card
		}
	}
	return cards
}
